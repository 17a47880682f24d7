"""How many drafted tokens to verify."""
