"""Work spread over many devices: tasks, who takes them, and the engines that reach them."""
