"""How fast a decode step is, beside the time that its bytes must take (`npmoe bench`)."""
