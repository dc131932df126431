"""Where the batches come from: files, libraries and generators, read onto the training device."""
