"""Names of the files that a release adds to the published bundles, and the format number of its records."""

FORMAT = 1

# At the top of a release. SHA256SUMS and statement.json list release.json, and nothing lists the other records.
RELEASE = "release.json"
MEASURED = "measured.json"
SUMS = "SHA256SUMS"
STATEMENT = "statement.json"
RECORDS = (RELEASE, MEASURED, SUMS, STATEMENT)
README = "README.md"
COMPILE_SCRIPT = "compile.sh"
CATALOG = "catalog.json"

# In each of its folders.
PROVENANCE = "provenance.json"
TOKENIZER = "tokenizer"
PLAN = "gemma4_plan.json"
CHUNKS_PLAN = "gemma4_chunks_plan.json"  # where the decoder is in chunks
METADATA = "metadata.json"  # where the folder is a language bundle
AOT = "aot.json"  # where it holds a bundle that was compiled ahead of time
