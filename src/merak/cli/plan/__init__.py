"""`merak plan`: the request, the search, and what is shown of it."""
