"""`mctl pack`: a folder that serves a bundle by itself, with nothing installed."""
