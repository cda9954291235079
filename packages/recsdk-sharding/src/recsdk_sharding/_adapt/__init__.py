"""Changes to torch and torchrec at import: devices, plans by hand, pipelines, checks."""
