"""The command line: thin shells around the library, one file per command."""
