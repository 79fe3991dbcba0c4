"""The template of model cards, what no model file tells (`*.yaml`), and the cards of what this package ships."""
