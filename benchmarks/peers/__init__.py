"""Other people's software, as sides of `isthmus.bench`."""
