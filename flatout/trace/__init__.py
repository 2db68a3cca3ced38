"""Where the time goes, seen from inside the training column: stdlib only, never blocks."""
