"""What a person sees on a terminal: tables and progress."""
