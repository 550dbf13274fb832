"""The gallery: measurements that users share as entries. This package checks and shows them, and starts a search near one."""
