"""Commands that print the project's figures: README.md."""
