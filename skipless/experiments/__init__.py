"""Experiments: recipes, figures and reports. The library never imports them."""
