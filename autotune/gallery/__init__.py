"""What others have measured: entries that anybody may send, checked, shown, and the start of a search nearby."""
