"""Layers that stream: which are at home, when the others fly, whose turn it is, and who else looks at them."""
