"""What came back: one record a request, figures of many, a page of plots, two runs compared."""
