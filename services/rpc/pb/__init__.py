"""Generated from proto/ by epdserve.services.rpc.generate; never edited, imported by rpc only."""
