"""Generated websites to explore: what they are like, their pages, and the server that hands them out."""
