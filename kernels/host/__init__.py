"""Small functions of rows on the host in native code, where it was built; see rows.py."""
