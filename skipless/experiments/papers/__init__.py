"""One folder for each paper whose claims are judged."""
