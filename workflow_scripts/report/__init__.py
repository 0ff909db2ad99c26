"""What a release tells people: the summary at the end of a run, and the pages and figures of the report."""
