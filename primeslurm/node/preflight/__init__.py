"""Is this node fit to work?"""
