"""What the package builds on: versions, and what of torch and torchrec is not public."""
