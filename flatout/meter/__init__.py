"""What the machine does while a run goes on: GPU, cores, memory, processes; sampled, written, read back."""
