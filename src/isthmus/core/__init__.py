"""What decides: pure, without clock, chance, sockets, files, threads or torch."""
