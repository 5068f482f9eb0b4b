// Command slow-link is a slow cable for the lab's `delay` lever: it copies Ethernet frames between two interfaces, both ways, each a
// fixed time after it came. It changes no frame and must never see one that is not whole: the lever switches off the offloads that
// leave checksums and segments to a later interface. VLAN tags are not carried.
//
// usage: slow-link ONE OTHER MILLISECONDS
package main

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"
)

const (
	// A cable is no store: what comes while so many frames are on their way one way is lost.
	framesOnTheWay = 16384
	// Larger than any frame of an interface without offloads.
	frameBytes = 65536
	// A burst must not be lost before it is even on its way.
	receiveBytes = 8 << 20
)

type frame struct {
	due   time.Time
	bytes []byte
}

// end is one end of the cable: a packet socket on an interface.
type end struct {
	name   string
	socket int
	index  int
}

// networkOrder turns a protocol number into what the kernel wants in a socket's address.
func networkOrder(number uint16) uint16 {
	var bytes [2]byte
	binary.BigEndian.PutUint16(bytes[:], number)
	return binary.NativeEndian.Uint16(bytes[:])
}

func open(name string) (end, error) {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return end{}, fmt.Errorf("interface %s: %w", name, err)
	}
	// No protocol until it is bound: else frames of every interface would come in between.
	socket, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return end{}, fmt.Errorf("a packet socket (root, and a kernel with CONFIG_PACKET, are needed): %w", err)
	}
	if err := syscall.SetsockoptInt(socket, syscall.SOL_SOCKET, syscall.SO_RCVBUFFORCE, receiveBytes); err != nil {
		return end{}, fmt.Errorf("the receive buffer of %s: %w", name, err)
	}
	// struct packet_mreq
	promiscuous := binary.NativeEndian.AppendUint32(nil, uint32(link.Index))
	promiscuous = binary.NativeEndian.AppendUint16(promiscuous, syscall.PACKET_MR_PROMISC)
	promiscuous = append(promiscuous, make([]byte, 10)...)
	if err := syscall.SetsockoptString(socket, syscall.SOL_PACKET, syscall.PACKET_ADD_MEMBERSHIP, string(promiscuous)); err != nil {
		return end{}, fmt.Errorf("%s cannot be made promiscuous: %w", name, err)
	}
	all := &syscall.SockaddrLinklayer{Protocol: networkOrder(syscall.ETH_P_ALL), Ifindex: link.Index}
	if err := syscall.Bind(socket, all); err != nil {
		return end{}, fmt.Errorf("the packet socket cannot be bound to %s: %w", name, err)
	}
	return end{name, socket, link.Index}, nil
}

// receive puts each frame that comes in on its way; it returns when the interface is down or gone.
func receive(from end, delay time.Duration, way chan<- frame) error {
	buffer := make([]byte, frameBytes)
	for {
		length, sender, err := syscall.Recvfrom(from.socket, buffer, 0)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("receiving on %s: %w", from.name, err)
		}
		// What this program sent comes by as well.
		if link, ok := sender.(*syscall.SockaddrLinklayer); ok && link.Pkttype == syscall.PACKET_OUTGOING {
			continue
		}
		select {
		case way <- frame{time.Now().Add(delay), append([]byte(nil), buffer[:length]...)}:
		default:
		}
	}
}

// send takes frames in the order in which they came, which is the order in which they are due.
func send(to end, way <-chan frame) {
	address := &syscall.SockaddrLinklayer{Ifindex: to.index}
	for next := range way {
		time.Sleep(time.Until(next.due))
		// A frame that cannot be sent is lost, as on a cable; an interface that is gone ends receive.
		_ = syscall.Sendto(to.socket, next.bytes, 0, address)
	}
}

func run(arguments []string) error {
	if len(arguments) != 3 {
		return fmt.Errorf("usage: slow-link ONE OTHER MILLISECONDS")
	}
	milliseconds, err := strconv.ParseUint(arguments[2], 10, 31)
	if err != nil {
		return fmt.Errorf("%q is no number of milliseconds", arguments[2])
	}
	delay := time.Duration(milliseconds) * time.Millisecond
	one, err := open(arguments[0])
	if err != nil {
		return err
	}
	other, err := open(arguments[1])
	if err != nil {
		return err
	}
	ended := make(chan error, 2)
	for _, direction := range [][2]end{{one, other}, {other, one}} {
		way := make(chan frame, framesOnTheWay)
		go send(direction[1], way)
		go func() { ended <- receive(direction[0], delay, way) }()
	}
	fmt.Println("forwarding")
	return <-ended
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "slow-link:", err)
		os.Exit(1)
	}
}
