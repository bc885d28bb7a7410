"""Messages and services of the public contract: generated from proto/ by `make proto`, never edited by hand."""
