"""Lookahead scheduling: predicts which turns come next and sends the daemon hints."""
