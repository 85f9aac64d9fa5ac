"""Is the compiled model the eager model?"""
