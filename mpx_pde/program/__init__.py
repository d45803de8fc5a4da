"""Jaxprs: tools to walk and bind them, the table of primitives, the user's lines."""
