"""
Pretraining and fine-tuning from a recipe (`egmla train`).

Documents are split into training and validation text by a hash of their content, tokenised, joined with end-of-text
between them and cut into blocks. The loop is the library's `Trainer`; what is added here is a parameter group for gate
tables, an exact validation loss, a JSON Lines log and a report of what was done.
"""

from .recipe import RecipeError, load_recipe
from .run import train
from .trainer import EGMLATrainer


__all__ = ["EGMLATrainer", "RecipeError", "load_recipe", "train"]
