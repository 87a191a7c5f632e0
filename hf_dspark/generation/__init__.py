"""Generation with a DSpark draft. Nothing is imported here: `proposal` below needs one module of this package."""
