"""Checkpoints in and out of EG-MLA."""
