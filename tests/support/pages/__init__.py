"""Execute the code blocks of documentation pages, in the order in which a reader would."""
