"""What jobs took (seconds, memory, bytes written), and what their results hold on the disk."""
