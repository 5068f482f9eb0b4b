// The program in the lab's pods. No module beside Go's own library.
module sticky-ipam/tests/tools/pod

go 1.26.0
