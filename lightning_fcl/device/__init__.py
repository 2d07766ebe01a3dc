"""What a model needs on a device, and how it gets there: reports, int8, files."""
