"""The administrator's page."""
