"""The gallery: measurements that users share as entries. It checks and shows them, and starts a search from the nearest one."""
