"""What the package builds on: versions, and private parts of torch and torchrec."""
