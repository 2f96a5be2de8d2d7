"""The only places that touch the machine: devices, compilers, files of the package, progress."""
