"""The head of a release's README.md: what the Hugging Face Hub reads of a model card, as YAML between two `---` lines.

Keys as the Hub's documentation has them (docs/hub/model-cards.md, docs/hub/repositories-licenses.md of its hub-docs).
The Hub refuses a commit whose card names a licence that it does not know.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

# What the Hub takes for `license`, as it lists them when it refuses another one.
_HUB_KNOWS = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
openmdw-1.0 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma unknown
"""
_UNNAMED = "custom"  # a licence that is carried as a file, and has no name


def front_matter(document: Mapping[str, Any]) -> str:
    """The head with both `---` lines, from the content of release.json."""
    origin = document["checkpoint"]["origin"]
    # The Hub would take it for a fine-tune, if it was not told.
    base = (
        {"base_model": origin["repository"], "base_model_relation": "quantized"}
        if origin["kind"] == "huggingface"
        else {}
    )
    head = {
        **_licence(document),
        **base,
        "pipeline_tag": "text-generation",
        "library_name": "coreai",
        "tags": ["coreai", "core-ai", "apple", "on-device", "gemma4"],
    }
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n"


def licence_link(document: Mapping[str, Any]) -> str | None:
    """Where the licence can be read: an address, or a file of the release; None where nothing says it."""
    licence, origin = document["licence"], document["checkpoint"]["origin"]
    link = licence["link"]
    if link is None:
        return licence["files"][0] if licence["files"] else None
    name = link.removeprefix("./")
    if "://" in link or name in licence["files"]:
        return name
    if origin["kind"] == "huggingface":  # a file of the checkpoint's repository that is not carried on
        return f"https://huggingface.co/{origin['repository']}/blob/{origin['commit']}/{name}"
    return None


def _licence(document: Mapping[str, Any]) -> dict[str, str]:
    """The licence's keys: one that the Hub knows by its name, any other as `other` with name and link."""
    name, link = document["licence"]["name"], licence_link(document)
    linked = {"license_link": link} if link else {}
    if name is None and link is None:
        return {"license": "unknown"}
    if name in _HUB_KNOWS.split():
        return {"license": name, **linked}
    return {"license": "other", "license_name": _slug(name or _UNNAMED), **linked}


def _slug(name: str) -> str:
    """A name as the Hub takes it: small letters, digits, dots and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or _UNNAMED
