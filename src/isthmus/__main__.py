"""`python -m isthmus` is the same as `isthmus`."""

from isthmus.cli.main import main

main()
