"""Tables of the documents, filled in from results."""
