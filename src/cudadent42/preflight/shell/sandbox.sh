skip 'asked of the kernel by `cudadent42 preflight`'
