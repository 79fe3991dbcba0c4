"""Named configurations of EG-MLA models, recipes, and the small trained model; read through importlib.resources."""
