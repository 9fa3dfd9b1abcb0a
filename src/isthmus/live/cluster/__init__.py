"""The live world: node processes, the head (conductor and gateway's handle), and the launcher."""
