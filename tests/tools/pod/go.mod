// The program in the lab's pods, and the slow cable of its links. No module beside Go's own library.
module sticky-ipam/tests/tools/pod

go 1.26.0
