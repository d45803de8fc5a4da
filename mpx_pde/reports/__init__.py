"""Reports on precision and ranges, and the diagnosis of a step."""
