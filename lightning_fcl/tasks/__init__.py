"""LightningModules that a federation can train, one client at a time or in cohorts."""
