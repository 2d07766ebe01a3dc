"""Plain ``nn.Module`` networks of the papers, one file each."""
