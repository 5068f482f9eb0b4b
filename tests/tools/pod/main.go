// Command pod is what runs in the lab's pods: it sleeps until it is told to end, says its addresses over HTTP (port 8080) and in
// its log, and echoes what it gets over TCP (port 7007). The page /from says whom the request came from. With the argument "pause"
// it only sleeps, as a pod's sandbox does; with "outside" it leaves no file behind, on a host that is no pod.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

// addresses lists the pod's own addresses, as the interface has them; the loopback and link-local ones say nothing.
func addresses() string {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Sprintf("error: %v", err)
	}
	var own []string
	for _, address := range all {
		if network, ok := address.(*net.IPNet); ok && network.IP.IsGlobalUnicast() {
			own = append(own, network.IP.String())
		}
	}
	return strings.Join(own, " ")
}

func echo(connection net.Conn) {
	defer connection.Close()
	io.Copy(connection, connection)
}

func serve(isPod bool) error {
	fmt.Println(addresses())
	if isPod {
		if err := os.WriteFile("/address", []byte(addresses()+"\n"), 0o644); err != nil {
			return err
		}
	}
	listener, err := net.Listen("tcp", ":7007")
	if err != nil {
		return err
	}
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go echo(connection)
		}
	}()
	http.HandleFunc("/", func(response http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(response, addresses())
	})
	http.HandleFunc("/from", func(response http.ResponseWriter, request *http.Request) {
		host, _, _ := net.SplitHostPort(request.RemoteAddr)
		fmt.Fprintln(response, host)
	})
	return http.ListenAndServe(":8080", nil)
}

func main() {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	if argument := strings.Join(os.Args[1:], " "); argument != "pause" {
		go func() {
			fmt.Fprintln(os.Stderr, serve(argument != "outside"))
			os.Exit(1)
		}()
	}
	<-stop
}
