"""What torch and torchrec are told while they run: devices, plans by hand, pipelines."""
